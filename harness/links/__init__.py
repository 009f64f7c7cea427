"""Links between the processes of a job that can be slowed, delayed, made lossy, corrupted or cut: any TCP transport,
no root, nothing changed in the transports.

The kernel hands every `connect` of the processes to a supervisor (`interception`), which leads it to a proxy
(`proxy`); what the proxy does with the bytes of each direction is a policy (`policy`).
"""
