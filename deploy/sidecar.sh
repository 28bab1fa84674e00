#!/bin/sh
# Stands in for the sidecar of colocated Python until there is one.
echo "waystation sidecar: colocated Python is not built yet; programs that call it fail, and nothing listens at ${GRPC_SERVER_ADDRESS:-port 50051}" >&2
trap 'kill $! 2>/dev/null; exit 0' TERM INT
while :; do
    sleep 3600 &
    wait $!
done
