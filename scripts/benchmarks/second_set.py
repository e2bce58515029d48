NETS = ()
