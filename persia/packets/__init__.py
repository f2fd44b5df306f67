"""Incremental updates: packets of changed rows, from the servers that train to those that serve.

packet         the manifest of a packet
log            a directory of packets
changes        the changes of one server, and the job that writes them
operation      one packet over all servers
stream         the packets of one run of a trainer, and what the next one follows
writer         writes packets while a job trains
applier        applies packets to a store
follow_target  the packet that followers should be at, and what they can start from
follower       keeps a copy of the rows at that packet
"""
