"""Requests in, streams of tokens out: blocks of keys and values, a scheduler, its simulator."""
