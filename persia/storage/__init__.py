"""Files of checkpoints and packets: where they are stored, and how they are read without trust.

location          a directory on any file system of fsspec, with atomic replacement
checksummed_json  JSON documents and pointers that carry their own checksum
manifest          names the files that make up a checkpoint
schema            the slots that rows belong to, and whether another job can use them
position          a place in a stream of packets
versions          a directory of checkpoints, the newest ones kept
shard_file        one file of rows: written from a snapshot, read by its index
dense             the torch files beside the rows
"""
