"""JetStream's gRPC service: our server of it, and a client that is an `Engine`.

`jetstream_pb2.py` is generated from `jetstream.proto` by grpcio-tools; from this folder:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. jetstream.proto
"""

SERVICE = "jetstream_proto.Orchestrator"
