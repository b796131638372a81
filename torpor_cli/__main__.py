"""``python -m torpor_cli``: the command `torpor`."""

from torpor_cli.app import main

main()
