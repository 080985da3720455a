"""Variables of the environment that let a job on a CPU have what compression saves.

By itself glibc keeps tensors of several MiB in a heap, where what is freed around a small payload is lost: a step at
L2 held 350 MB, where with each tensor in pages of its own it held 80 MB, and the untouched one 375 and 246.
"""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "524288"}
