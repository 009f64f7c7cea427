"""What runs while it is broken: each file has the bodies of the processes of one workload."""
