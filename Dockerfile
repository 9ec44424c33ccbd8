# Simulator, master and worker in one image: `vllm-locust simulate …` or `locust …`.
# The base is of a minor version, so that a new build has its latest fixes.
FROM python:3.12-slim-bookworm AS build

RUN python -m venv /venv
# Dependencies first: what changes with every commit does not install them again.
COPY pyproject.toml /src/
RUN python -c "import tomllib; print(*tomllib.load(open('/src/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      >/src/dependencies.txt \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check --requirement /src/dependencies.txt
COPY README.md LICENSE /src/
COPY vllm_locust /src/vllm_locust
COPY locustfiles /src/locustfiles
COPY scenarios /src/scenarios
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /src

FROM python:3.12-slim-bookworm

LABEL org.opencontainers.image.title="vllm-locust" \
      org.opencontainers.image.description="Measures streaming LLM servers, with Locust" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --create-home --uid 1000 locust
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

USER locust
WORKDIR /home/locust
COPY --chown=locust:locust locustfiles locustfiles
# A volume that is mounted here belongs to whom the directory belongs.
RUN mkdir results
CMD ["vllm-locust", "--help"]
