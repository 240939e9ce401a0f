"""Its folder is on the path of every test, so that helpers are imported as `support.…`."""
