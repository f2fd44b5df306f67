"""PersiaJob on Kubernetes. A distribution of its own: it never imports `persia`, only names its commands."""
