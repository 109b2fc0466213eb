"""The flags that this service is run and measured with. Ray Serve reads them from the environment
when it is imported, in every process. No Ray here: set them first, on every node:

    export $(python -m deployments.serve_flags)

Without gRPC between deployments the loss of a node stops the streams of others as well: a replica
waits, and its whole event loop with it, until Ray knows that an ingress it streams to is dead.

THROUGHPUT_OPTIMIZED      user code on the main loop, gRPC between deployments
PROXY_USE_GRPC            gRPC from the HTTP proxy as well, which the first one forgets
MAX_MESSAGE_LENGTH        what gRPC lets pass: an answer that is not streamed is one message
PROXY_CALLBACK            the guards around the proxy, without which a client can take its memory
PROXY_READY_CHECK         seconds in which the proxy must be up, three times: with Ray's own 5, one
                          that starts on a busy machine is killed, and `serve run` fails
"""

SERVE_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.edge:guards",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
}

if __name__ == "__main__":
    print("\n".join(f"{name}={value}" for name, value in SERVE_FLAGS.items()))
