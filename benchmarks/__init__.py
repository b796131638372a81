"""Commands that measure, side by side with peers in one run; results/ holds their JSON."""
