"""gact_dist inside other frameworks; nothing in the rest of the package imports these."""
