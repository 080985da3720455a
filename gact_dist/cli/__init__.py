"""The command line `gact-dist`: what a job's memory is made of, plans, the largest batch, and reports on runs.

Needs the extra "cli" (typer, rich, plotly); the rest of the package does without it. Nothing here is imported by it.
"""

__all__: list[str] = []
