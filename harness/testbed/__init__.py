"""Things to break: network namespaces, etcd, a small disk."""
