"""The check of a backend before its first use on a device: in a process of its own, then here, against float64."""
