"""A proxy that can slow, delay, lose, corrupt or cut the bytes between the processes of a job.

It serves any TCP transport, unchanged and without root. The kernel hands every `connect` of the processes to a
supervisor (`seccomp`, `supervisor`), which leads it to a proxy (`proxy`); a policy (`policy`) says what the proxy does
with the bytes of each direction.
"""
