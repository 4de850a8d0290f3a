"""Arrays on disks, and moves between memories."""
