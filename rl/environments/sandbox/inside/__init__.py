"""What runs on the other side of the wall: the template process, and each run that it forks.

These modules import the standard library alone, and only each other of holdfast: the template starts in 40 ms and holds
nothing of the job's memory.
"""
