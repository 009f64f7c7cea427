"""Test environments for faults: network namespaces, etcd, a small disk."""
