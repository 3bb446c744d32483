from tidemill.client import AsyncClient as AsyncClient
from tidemill.client import Client as Client
from tidemill.llm import LLM as LLM
from tidemill.sampling_params import BeamSearchParams as BeamSearchParams
from tidemill.sampling_params import SamplingParams as SamplingParams
from tidemill.sampling_params import SparseParams as SparseParams
from tidemill.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from tidemill.security.client_tls import ClientTls as ClientTls

__version__: str
