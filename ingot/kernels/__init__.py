"""HOW ops are computed: a folder for each provider, in it a file for each family of ops.

`ops` never imports this package; the record of an op loads its providers at the first call.
"""
