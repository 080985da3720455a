"""Programs to copy from: each `minimal_*.py` is complete; `train` is the application that launch/demo.sh runs."""
