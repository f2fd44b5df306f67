"""Dumps and loads of a running job: the coordinator's side, and the side of each server. docs/checkpoints.md.

Import from the modules: the package imports nothing, so that a server loads no more than it needs. Files and
their formats are in `persia.storage`. `persia.tiers` and `persia.packets` add operations of their own.

    checkpoints    what contexts use: dumps and loads, in the foreground or in the background
    coordinator    one dump or load over all servers
    operation      what dumps, loads and packets have in common: requests to all servers, polled for progress
    peers          the servers as the coordinator sees them: over NATS, or in this process
    protocol       requests and reports between coordinator and servers
    service        answers the requests on a server
    server_job     one dump or load on one server
    training_dump  asks rank 0 to dump dense weights and rows together
"""
