"""What does a training step cost in time and memory, and how large may its batch be?"""
