"""Checkpoints: what a job writes of its rows and its model, and how it comes back. docs/checkpoints.md.

Import from the modules; this package imports nothing, so that a server loads no more than it needs.

    storage      one directory anywhere: files that appear complete or not at all
    schema       which slots the rows belong to, and whether another job can use them
    fields       of JSON documents, read without trust
    manifest     what makes a set of files a checkpoint
    position     a place in a stream of packets
    packet       what makes a set of files a packet of changes
    packet_log   a directory of packets
    versions     a directory of checkpoints, the newest ones kept
    shard_file   one file of rows: written from a snapshot, read by its index
    protocol     what a coordinator and a server say to each other
    server_job   a dump or a load of one server
    service      the jobs of one server, by request
    peers        the servers as a coordinator sees them: behind NATS, or in this process
    coordinator  one dump or load over all servers
    dense        the torch files beside the rows
    checkpoints  what contexts use
    rows         rows of a checkpoint for tools
"""
