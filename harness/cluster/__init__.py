"""Ranks on this machine: processes or threads, called or run as a job."""
