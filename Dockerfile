# Simulator, master and worker in one image: `vllm-locust simulate …` or `locust …`.
FROM python:3.12-slim

COPY pyproject.toml README.md LICENSE /src/
COPY vllm_locust /src/vllm_locust
COPY locustfiles /src/locustfiles
COPY scenarios /src/scenarios
RUN pip install --no-cache-dir --disable-pip-version-check /src \
 && useradd --create-home --uid 1000 locust

USER locust
WORKDIR /home/locust
COPY --chown=locust:locust locustfiles locustfiles
# A volume that is mounted here belongs to whom the directory belongs.
RUN mkdir results
ENV PYTHONUNBUFFERED=1
CMD ["locust", "--help"]
