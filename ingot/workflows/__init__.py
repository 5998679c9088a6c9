"""Whole tasks in one call: generate text, train, serve. The command line parses and prints."""
