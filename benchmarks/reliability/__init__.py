"""Does gact_dist ever change or break a job that stores exactly, or leak in a long one?"""
