"""HTTP between processes.

http_server.py   checks before a body is read, limits, metrics, the thread of a server
http_client.py   a JSON body in, the bytes of the answer out, with retries
api_keys.py      keys of servers, from environment variables
calls.py         calls that may never end, in a thread that the process does not wait for
"""
