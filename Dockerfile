# zjax for NVIDIA GPUs: JAX brings CUDA along, the host has the driver and its container toolkit.
#
#     docker build --tag zjax .
#     docker run --gpus all --shm-size 16g --stop-timeout 120 --volume "$PWD/runs:/zjax/runs" \
#         zjax train --config=gpt2_124m
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1
WORKDIR /zjax
COPY . .
RUN pip install --no-cache-dir '.[cuda12]'

# Without a shell between them, `docker stop` tells zjax to save.
ENTRYPOINT ["zjax"]
