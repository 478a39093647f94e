// Where the pages get their data: from the server that sent them, or from the file that they are in.

const embedded = document.getElementById("embedded");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

export const isFile = answers !== null;
export const fileNote = answers ? answers.note : "";

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function get(path, options = {}) {
  if (answers) {
    path = path.split("?")[0]; // the file has the first samples of a step only
    if (!(path in answers.answers)) await unpack(path.split("/").slice(0, 4).join("/"));
    if (path in answers.answers) return answers.answers[path];
    throw new Problem("This is not in the file: it holds some of the steps and samples only.", 404);
  }
  const token = sessionStorage.getItem("token");
  let response;
  try {
    response = await fetch(`api/${path}`, { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal: options.signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is `plaudit view` still running?", 0);
  }
  if (response.ok) return response.json();
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).message || message;
  } catch {
    // not JSON: the status has to do
  }
  throw new Problem(message, response.status);
}

// A step's samples are compressed in the file until they are looked at.
async function unpack(place) {
  const packed = answers.packed[place];
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  Object.assign(answers.answers, JSON.parse(await new Response(stream).text()));
  delete answers.packed[place];
}

// Samples in the file, for a search without a server.
export async function embeddedSamples(run, split) {
  const found = [];
  for (const place of Object.keys(answers.packed)) if (place.startsWith(`runs/${run}/${split}/`)) await unpack(place);
  for (const [path, answer] of Object.entries(answers.answers)) {
    const parts = path.split("/");
    if (parts.length === 5 && parts[1] === String(run) && parts[2] === split) found.push(answer);
  }
  return found.sort((a, b) => b.step - a.step || a.row - b.row);
}

export function setToken(token) {
  sessionStorage.setItem("token", token);
}
