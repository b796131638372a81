"""Tasks: one side effect each, typed in and out, retried on their own. No bytes of a workspace pass
through a task.
"""
