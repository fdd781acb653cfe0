"""The methods: how a domain is built on a base. One file each, found by a scan of this folder."""
