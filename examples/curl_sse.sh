#!/usr/bin/env bash
# A streamed chat with curl alone: server-sent events, one JSON object behind each `data: `.
#
# usage: examples/curl_sse.sh [http://HOST:PORT/v1]
set -euo pipefail
url="${1:-${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}}"

# -N shows every event when it comes; --fail-with-body prints what was wrong and exits with 22.
curl -N -sS --fail-with-body "$url/chat/completions" -H 'content-type: application/json' -d '{
  "model": "demo",
  "messages": [{"role": "user", "content": "count: 37 n=5"}],
  "stream": true,
  "stream_options": {"include_usage": true}
}'
