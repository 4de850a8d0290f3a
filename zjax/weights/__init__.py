"""Arrays by name in any layout: read, renamed, reshaped, decoded and written."""
