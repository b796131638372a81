"""What a team runs: the server, worker, blocks and deployments that ``make up`` starts."""
