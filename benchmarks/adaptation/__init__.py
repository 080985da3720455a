"""What does an adaptation cost, and how good are its estimates and its allocation?"""
