"""How KV moves between instances: frames, transport, the serving and the pulling side."""
