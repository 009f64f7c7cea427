"""The workloads of scenarios: each file has the bodies of the processes of one family."""
