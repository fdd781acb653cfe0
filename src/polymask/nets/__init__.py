"""Where bases come from: networks with names, files, modules."""
