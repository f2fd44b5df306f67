"""Messages between processes over NATS: subjects, payloads, the session, and discovery of services.

Import from the modules; this package imports nothing, so that names and payloads can be used without a NATS
client.
"""
