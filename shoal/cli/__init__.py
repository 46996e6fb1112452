"""The command line: options in, one clear message out. Nothing is computed here."""
