"""Kernels: a package for each provider of ops, with a module for each family of ops.

A provider declares its `PRIORITY`, an integer: of the providers that support a call, the one with
the highest computes it (`ingot.ops.dispatch`). `ingot.ops` does not import this package; an op
imports its providers at its first call.
"""
