from benchmarks.nets import Net


NETS: tuple[Net, ...] = ()
