"""Arrays of a state on the host and on disks, and transfers to and from devices."""
