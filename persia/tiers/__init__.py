"""Storage tiers: rows of a server in a tier file, and the checkpoints of the job that they belong to.

commit_record  which checkpoint a tier holds, and whether it is committed
server_tier    the tier of one server, and the dumps and loads whose rows stay in it
"""
