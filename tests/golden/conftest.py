"""Programs that write golden values need packages that tests do not."""

collect_ignore_glob = ["make_*.py"]
