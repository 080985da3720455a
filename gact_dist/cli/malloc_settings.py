"""Variables of the environment for jobs on a CPU: so that they have what compression saves, and are not held up.

By itself glibc keeps tensors of several MiB in a heap, where what is freed around a small payload is lost: a step at
L2 held 350 MB, where with each tensor in pages of its own it held 80 MB, and the untouched one 375 and 246.
"""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "524288"}

WAITING_SETTINGS = {"OMP_WAIT_POLICY": "passive"}
"""so that threads of OpenMP sleep while they wait: where other processes run, spinning ones take the cores from those
that work. With a load of 5 on two cores a step of a small GPT-2 took 25 s, and 1.7 with this."""
