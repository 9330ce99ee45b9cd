"""Tinker's wire, as of its SDK 0.38.

`tinker_pb2.py` is generated from `tinker.proto` by grpcio-tools; from this folder:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. tinker.proto
"""
