"""The application that launch/demo.sh runs: real data, six models, DistributedDataParallel or DeepSpeed.

`jobs` has the lines that gact_dist adds; the other files know nothing of compression.
"""
