"""Host offload: a state stored on the host or disks that streams through devices."""
